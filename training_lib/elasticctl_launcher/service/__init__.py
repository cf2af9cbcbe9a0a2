"""What the launcher says to the rendezvous service and hears from it; none of it imports torch."""
