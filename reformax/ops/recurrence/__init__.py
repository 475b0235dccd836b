"""Linear recurrences in chunks, and what stands before and behind them."""
