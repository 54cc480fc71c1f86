# SPDX-License-Identifier: Apache-2.0
"""Messages between the parts of the supervisor: ``fleet.proto``, its stubs, and their values.

Both ends of a stream must speak the same `PROTOCOL_VERSION`: a daemon of another version is refused with a
sentence at the handshake, because a field that one side does not know could change what a message means.
"""

#: Raised with every change of meaning in fleet.proto.
PROTOCOL_VERSION = 3
