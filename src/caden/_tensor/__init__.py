"""Private helpers on rows, states and threads."""
