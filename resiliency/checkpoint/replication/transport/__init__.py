# SPDX-License-Identifier: Apache-2.0
"""Connections between agents of different hosts: messages, bytes and the handshake."""
