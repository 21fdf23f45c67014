"""Markers and fixtures that every kind of test shares."""
