"""Suites of prompts, what is measured on them, and the report."""
