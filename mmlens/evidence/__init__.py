"""From regions of a picture to token positions: regions, views (the arithmetic), locate."""
