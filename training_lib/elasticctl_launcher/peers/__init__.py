"""Copies of ranks' newest shares in memory: in this launcher's folder, and in that of a launcher on another node."""
