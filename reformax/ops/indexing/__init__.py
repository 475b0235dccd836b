"""An indexer: which keys a query sees, by scores of small vectors."""
