"""Recordings of what a program shows on a terminal, made from real runs."""
