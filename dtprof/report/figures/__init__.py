"""Plotly figures, one a file: each draws results of the analysis and computes nothing."""
