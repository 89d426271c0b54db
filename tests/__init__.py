"""The test tiers of Rung; README.md here says what each one needs."""
