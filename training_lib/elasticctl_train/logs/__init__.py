"""What workers print, kept in their job's storage: format and reading. Without torch."""
