"""The launcher's communication with the rendezvous service; none of it imports torch."""
