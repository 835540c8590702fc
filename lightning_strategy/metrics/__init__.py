"""Logged values and torchmetrics in compiled steps."""
