"""What a target and a drafter do on prompts, as rows of `data`: `rounds` of real decoding, dense
`anchors` along the target's own responses, `asking` for what both share.
"""
