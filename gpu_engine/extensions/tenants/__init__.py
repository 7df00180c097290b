"""Tenants: who calls, what each may use, and what one may see of another.

`access` lets callers in, and `accounts` keeps each tenant's limits. Nothing here runs on a server without
`tenant_file`.
"""
