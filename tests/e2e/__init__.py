"""The real binary, the real engine and the real model, driven as users drive them."""
