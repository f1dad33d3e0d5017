"""How do the ranks of one generation find each other, and talk?"""
