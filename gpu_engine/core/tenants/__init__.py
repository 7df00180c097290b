"""Slots between tenants: which one's sequence is next. Pure, as the scheduler is."""
