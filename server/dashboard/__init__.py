"""The live page at /dashboard: what it is fed, and the page itself."""
