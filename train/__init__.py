"""The drafter, its blocks and objective, and the DeepSpeed loop that distils it."""
