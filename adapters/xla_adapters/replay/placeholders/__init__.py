"""Replays of steps that are traced with placeholders."""
