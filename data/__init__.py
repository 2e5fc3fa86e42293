"""From prompts to the target's own text and hidden states, in shards."""
