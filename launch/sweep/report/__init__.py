"""`launch report`: tables and plots of benchmark results, as one HTML page."""
