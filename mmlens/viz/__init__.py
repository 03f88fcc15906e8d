"""Figures and pages: one self-contained file each, nothing loaded from elsewhere."""
