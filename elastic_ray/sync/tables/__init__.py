"""How do the gradients of tables travel of which a step touches few rows? (torch)"""
