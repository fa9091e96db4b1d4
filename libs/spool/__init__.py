"""A durable spool: records appended to files in a folder, read back in order after any crash.

Owns framing, rotation, the bound in bytes and the recovery of a torn tail. It knows nothing of what a
record means; a record is bytes.

    writer = SpoolWriter(directory, max_bytes=64 << 20, segment_bytes=1 << 20, fsync=True)
    writer.append(b"...")                      # in the folder when this returns
    writer.seal()                              # what was appended so far may now be taken away
    for segment in read_segments(directory):   # oldest first
        if segment.number != writer.active_number:
            handle(segment.records())
            segment.delete()

A folder has one writer at a time, in one process. Reading and deleting sealed segments is free to anyone.
"""

from libs.spool.frames import FrameScan, encode_frame, scan_frames
from libs.spool.segments import Segment, SegmentNumber, SpoolWriter, read_segments, spool_size_bytes

__all__ = [
    "FrameScan",
    "Segment",
    "SegmentNumber",
    "SpoolWriter",
    "encode_frame",
    "read_segments",
    "scan_frames",
    "spool_size_bytes",
]
