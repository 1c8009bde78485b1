"""The vocabulary and the seams. Everything else imports from here; nothing here imports from
anything of ours.
"""
