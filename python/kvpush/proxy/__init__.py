"""The router: one OpenAI server in front of prefill and decode servers.

`config` holds its settings, `legs` builds the bodies of both legs, `headers` their headers,
`balance` chooses backends, `relay` runs both legs of one request, `server` is the HTTP server
around it.
"""
