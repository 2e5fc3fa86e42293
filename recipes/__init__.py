"""What to do: the schema of a recipe, the recipes themselves, and the manifests of what they make."""
