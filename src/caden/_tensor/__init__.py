"""Private helpers for rows, states and threads."""
