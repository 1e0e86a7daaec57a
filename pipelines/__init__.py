"""Layer 3: the command line, the stage table, executors and reports."""
