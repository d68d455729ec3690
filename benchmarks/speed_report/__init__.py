"""The tables and the plot of docs/speed.md."""
