"""What proposes: sequences with the trees drafted after them, passes over them, and the gRPC
service of a drafter.
"""
