"""The embedded models: how they are made, and their weights as package data."""
