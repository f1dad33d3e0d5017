"""Integrations with other training and data libraries; each module is imported only when it is used."""
