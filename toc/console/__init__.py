"""The web console: pages over the calls of the gateway, in its process, by the access token that logs in."""
