"""Numbers and pictures about decoding: `replay` of collected responses under any method, `fate` of
a round, `plots`; `lossless` compares with plain decoding, `doctor` examines drafters.
"""
