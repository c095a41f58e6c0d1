"""Test the room of all private names of torch that kvpass uses."""
