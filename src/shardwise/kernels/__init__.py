"""Arithmetic that is written once for speed, each piece beside a plain reference in its test."""
