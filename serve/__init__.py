"""The target at work: the vLLM engine, its server and its client."""
