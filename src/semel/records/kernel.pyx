# cython: language_level=3, cdivision=True
"""The compiled loops under the record codec: records to Arrow's buffers, Arrow's buffers to records, and Kafka's murmur2.

Nothing here decides what an error means: a batch that is refused is read again by `reference`, which names the damage.
Every byte is read and written behind a check that it is there, whatever the lengths and counts around it claim, and all
loops run without the GIL. It is built for Python's stable ABI, so that one file serves every Python from 3.11 on.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

cdef extern from *:
    """
    #ifndef SEMEL_SOURCE_DIGEST
    #define SEMEL_SOURCE_DIGEST ""
    #endif
    """
    const char *SEMEL_SOURCE_DIGEST

SOURCE_DIGEST = SEMEL_SOURCE_DIGEST.decode()
"""SHA-256 of the source that this was built of: a test holds it against the source beside it."""

RECORD_BYTES_MIN = 7  # one byte each for length, attributes, two deltas, key length, value length and header count
ROW_BYTES_MAX = 36  # what a record takes at most besides its key, value and headers
HEADER_BYTES_MAX = 10  # and a header besides its own bytes


cdef class _View:
    """The bytes of a buffer, held for as long as they are read or written."""

    cdef Py_buffer buffer
    cdef bint held
    cdef uint8_t *bytes
    cdef Py_ssize_t size

    def __cinit__(self, source, bint writable=False):
        self.bytes = NULL
        self.size = 0
        if source is None:
            return
        PyObject_GetBuffer(source, &self.buffer, PyBUF_WRITABLE if writable else PyBUF_SIMPLE)
        self.held = True
        self.bytes = <uint8_t *>self.buffer.buf
        self.size = self.buffer.len

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.buffer)


# -- varints -------------------------------------------------------------------------------------------------------


cdef struct Cursor:
    const uint8_t *data
    Py_ssize_t position
    Py_ssize_t end


cdef inline bint _read_varint(Cursor *cursor, int bits, int64_t *value) noexcept nogil:
    """Whether a zigzag number of at most so many bits stands before the end; longer forms than needed are legal."""
    cdef uint32_t byte
    cdef Cursor long_cursor
    cdef int64_t long_value = 0
    cdef bint in_order
    if cursor.position >= cursor.end:
        return False
    byte = cursor.data[cursor.position]
    if byte < 0x80:  # most numbers are small
        cursor.position += 1
        value[0] = <int64_t>(byte >> 1) ^ -<int64_t>(byte & 1)
        return True
    long_cursor = cursor[0]  # a copy, so that the compiler can keep the cursor itself in registers
    in_order = _read_long_varint(&long_cursor, bits, &long_value)
    cursor.position, value[0] = long_cursor.position, long_value
    return in_order


cdef bint _read_long_varint(Cursor *cursor, int bits, int64_t *value) noexcept nogil:
    cdef uint64_t result = 0
    cdef uint64_t byte
    cdef int shift = 0
    while shift < bits and cursor.position < cursor.end:
        byte = cursor.data[cursor.position]
        cursor.position += 1
        if shift == 63 and byte > 1:
            return False
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            if bits == 32 and result >> 32:
                return False
            value[0] = <int64_t>((result >> 1) ^ (~(result & 1) + 1))
            return True
        shift += 7
    return False


cdef inline bint _read_length(Cursor *cursor, int64_t *length) noexcept nogil:
    """Whether the length of a string comes next, -1 for null, and so many bytes follow; steps over them."""
    if not _read_varint(cursor, 32, length) or length[0] < -1 or length[0] > cursor.end - cursor.position:
        return False
    if length[0] > 0:
        cursor.position += length[0]
    return True


cdef inline uint64_t _zigzag(int64_t value) noexcept nogil:
    return (<uint64_t>value << 1) ^ (~(<uint64_t>value >> 63) + 1)


cdef inline int _width(uint64_t zigzagged) noexcept nogil:
    cdef int width = 1
    while zigzagged >= 0x80:
        zigzagged >>= 7
        width += 1
    return width


cdef inline uint8_t *_write_varint(uint8_t *to, uint64_t zigzagged) noexcept nogil:
    while zigzagged >= 0x80:
        to[0] = <uint8_t>(zigzagged | 0x80)
        zigzagged >>= 7
        to += 1
    to[0] = <uint8_t>zigzagged
    return to + 1


# -- records to Arrow's buffers ------------------------------------------------------------------------------------


cdef struct Batch:
    const uint8_t *data
    Py_ssize_t size
    Py_ssize_t first_row
    Py_ssize_t record_count
    int64_t base_offset
    int64_t last_offset_delta
    int64_t base_timestamp
    int64_t append_timestamp
    bint has_append_timestamp
    int64_t headers_max


cdef struct Places:
    int32_t *keys  # where each begins in its batch, -1 for null
    int32_t *values
    int32_t *sections  # where the headers of each record begin, behind their count
    int32_t *counts  # how many headers each has


cdef struct Rows:
    int64_t *offsets
    int64_t *timestamps
    int32_t *key_ends  # one more than rows, from 0 on
    int32_t *value_ends
    Py_ssize_t null_keys
    Py_ssize_t null_values
    int64_t headers
    int64_t header_key_bytes
    int64_t header_value_bytes
    int64_t null_header_values


cdef struct Headers:
    int32_t *key_ends
    int32_t *value_ends
    uint8_t *present
    uint8_t *keys
    uint8_t *values


cdef bint _scan_headers(Cursor *record, int64_t count, Rows *rows) noexcept nogil:
    """Whether so many headers follow; adds up what they will take."""
    cdef int64_t length
    cdef int64_t number
    for number in range(count):
        if not _read_length(record, &length) or length < 0:
            return False
        rows.header_key_bytes += length
        if not _read_length(record, &length):
            return False
        if length < 0:
            rows.null_header_values += 1
        else:
            rows.header_value_bytes += length
    return True


cdef bint _scan(const Batch *batch, Rows *rows, Places *places) noexcept nogil:
    """Whether the batch holds exactly the records that its header states; notes where their parts are."""
    cdef Cursor record
    cdef int64_t number, length
    cdef int64_t last_delta = -1
    cdef int64_t headers_left = batch.headers_max
    cdef Py_ssize_t row
    record.data = batch.data
    record.position = 0
    for row in range(batch.first_row, batch.first_row + batch.record_count):
        record.end = batch.size
        if not _read_varint(&record, 32, &number) or number < 1 or number > record.end - record.position:
            return False
        record.end = record.position + <Py_ssize_t>number
        record.position += 1  # the attributes, which mean nothing
        if not _read_varint(&record, 64, &number):
            return False
        rows.timestamps[row] = (
            batch.append_timestamp
            if batch.has_append_timestamp
            else <int64_t>(<uint64_t>batch.base_timestamp + <uint64_t>number)
        )
        if not _read_varint(&record, 32, &number) or number <= last_delta or number > batch.last_offset_delta:
            return False
        last_delta = number
        rows.offsets[row] = batch.base_offset + number
        if not _read_length(&record, &length):
            return False
        if length < 0:
            rows.null_keys += 1
            places.keys[row] = -1
            length = 0
        else:
            places.keys[row] = <int32_t>(record.position - length)
        rows.key_ends[row + 1] = rows.key_ends[row] + <int32_t>length
        if not _read_length(&record, &length):
            return False
        if length < 0:
            rows.null_values += 1
            places.values[row] = -1
            length = 0
        else:
            places.values[row] = <int32_t>(record.position - length)
        rows.value_ends[row + 1] = rows.value_ends[row] + <int32_t>length
        if not _read_varint(&record, 32, &number) or number < 0 or number > headers_left:
            return False
        headers_left -= number
        rows.headers += number
        places.counts[row] = <int32_t>number
        places.sections[row] = <int32_t>record.position
        if number:
            if not _scan_headers(&record, number, rows):
                return False
        if record.position != record.end:
            return False
    return record.position == batch.size


cdef void _copy_strings(
    const Batch *batch, const int32_t *places, const int32_t *ends, int32_t size, uint8_t *to, uint8_t *present
) noexcept nogil:
    """Put the strings of one column in a row, `size` bytes together; `present` gets a bit for each that is not null."""
    cdef Py_ssize_t row
    cdef int32_t length
    for row in range(batch.first_row, batch.first_row + batch.record_count):
        if places[row] < 0:
            continue
        length = ends[row + 1] - ends[row]
        if length <= 16 and batch.size - places[row] >= 16 and size - ends[row] >= 16:
            # Short ones by a move of fixed size, where a call would take longer; the next overwrites what is too much.
            memcpy(to + ends[row], batch.data + places[row], 16)
        else:
            memcpy(to + ends[row], batch.data + places[row], length)
        if present != NULL:
            present[row >> 3] |= 1 << (row & 7)


cdef bint _copy_headers(
    const Batch *batch, const Places *places, const Rows *rows, Headers *to, Py_ssize_t *filled
) noexcept nogil:
    """Put the headers of a scanned batch in a row, behind those before; they are read with all checks once more."""
    cdef Cursor record
    cdef Py_ssize_t row
    cdef Py_ssize_t at = filled[0]
    cdef int32_t number
    cdef int64_t length
    record.data = batch.data
    record.end = batch.size
    for row in range(batch.first_row, batch.first_row + batch.record_count):
        record.position = places.sections[row]
        for number in range(places.counts[row]):
            if not _read_length(&record, &length) or length < 0 or length > rows.header_key_bytes - to.key_ends[at]:
                return False
            memcpy(to.keys + to.key_ends[at], record.data + record.position - length, length)
            to.key_ends[at + 1] = to.key_ends[at] + <int32_t>length
            if not _read_length(&record, &length) or length > rows.header_value_bytes - to.value_ends[at]:
                return False
            if length < 0:
                length = 0
            else:
                to.present[at >> 3] |= 1 << (at & 7)
                memcpy(to.values + to.value_ends[at], record.data + record.position - length, length)
            to.value_ends[at + 1] = to.value_ends[at] + <int32_t>length
            at += 1
    filled[0] = at
    return True


cdef class _Group:
    """Batches of which the records come into one set of columns."""

    cdef Batch *batches
    cdef Py_ssize_t count
    cdef Py_ssize_t row_count
    cdef Places places
    cdef list views

    def __cinit__(self, list group, int64_t headers_max, allocate):
        cdef _View view
        cdef Batch *batch
        self.batches = <Batch *>PyMem_Malloc(max(len(group), 1) * sizeof(Batch))
        if self.batches == NULL:
            raise MemoryError
        self.views = []
        cdef Py_ssize_t bytes_left = INT32_MAX  # Arrow's offsets have 32 bits
        for header, body in group:
            view = _View(body)
            self.views.append(view)
            batch = &self.batches[self.count]
            batch.data, batch.size, batch.first_row = view.bytes, view.size, self.row_count
            batch.record_count = header.record_count
            if view.size > bytes_left or batch.record_count < 0 or batch.record_count > view.size // RECORD_BYTES_MIN:
                self.row_count = -1
                return
            batch.base_offset, batch.last_offset_delta = header.base_offset, header.last_offset_delta
            batch.base_timestamp, batch.append_timestamp = header.base_timestamp, header.max_timestamp
            batch.has_append_timestamp = header.timestamp_type
            batch.headers_max = headers_max
            bytes_left -= view.size
            self.row_count += batch.record_count
            self.count += 1
        # From Arrow's allocator like the columns, since it keeps memory that is warm.
        view = _View(allocate(4 * self.row_count * sizeof(int32_t)), True)
        self.views.append(view)
        self.places.keys = <int32_t *>view.bytes
        self.places.values = self.places.keys + self.row_count
        self.places.sections = self.places.values + self.row_count
        self.places.counts = self.places.sections + self.row_count

    def __dealloc__(self):
        PyMem_Free(self.batches)


def read_records(list group, int64_t headers_max, allocate):
    """The columns of the records of a list of (header, body), or None if one of the batches is not in order.

    `allocate` makes a writable buffer of so many bytes. Returns the number of rows, offsets, timestamps, keys, values
    and headers. Keys and values are (validity or None, ends, bytes); headers are None if no record has any, else
    (ends, keys, values).
    """
    cdef _Group self = _Group(group, headers_max, allocate)
    if self.row_count < 0:
        return None
    cdef Rows rows
    memset(&rows, 0, sizeof(Rows))
    cdef Py_ssize_t count = self.row_count
    offsets, timestamps = allocate(8 * count), allocate(8 * count)
    key_ends, value_ends = allocate(4 * (count + 1)), allocate(4 * (count + 1))
    held = [_View(each, True) for each in (offsets, timestamps, key_ends, value_ends)]
    rows.offsets, rows.timestamps = <int64_t *>(<_View>held[0]).bytes, <int64_t *>(<_View>held[1]).bytes
    rows.key_ends, rows.value_ends = <int32_t *>(<_View>held[2]).bytes, <int32_t *>(<_View>held[3]).bytes
    rows.key_ends[0] = rows.value_ends[0] = 0
    cdef Py_ssize_t index
    cdef bint in_order = True
    with nogil:
        for index in range(self.count):
            in_order = in_order and _scan(&self.batches[index], &rows, &self.places)
    if not in_order:
        return None
    keys = _gather(self, self.places.keys, rows.key_ends, rows.null_keys, key_ends, allocate)
    values = _gather(self, self.places.values, rows.value_ends, rows.null_values, value_ends, allocate)
    if rows.headers == 0:
        return count, offsets, timestamps, keys, values, None
    headers = _gather_headers(self, &rows, allocate)
    return None if headers is None else (count, offsets, timestamps, keys, values, headers)


cdef tuple _gather(_Group group, int32_t *places, int32_t *ends, Py_ssize_t nulls, ends_buffer, allocate):
    content = allocate(ends[group.row_count])
    validity = allocate((group.row_count + 7) // 8) if nulls else None
    cdef _View to = _View(content, True)
    cdef _View bits = _View(validity, True)
    cdef Py_ssize_t index
    with nogil:
        if bits.size:
            memset(bits.bytes, 0, bits.size)
        for index in range(group.count):
            _copy_strings(&group.batches[index], places, ends, ends[group.row_count], to.bytes, bits.bytes)
    return validity, ends_buffer, content


cdef tuple _gather_headers(_Group group, Rows *rows, allocate):
    cdef Headers to
    cdef Py_ssize_t count = rows.headers
    row_ends = allocate(4 * (group.row_count + 1))
    buffers = [
        allocate(size)
        for size in (4 * (count + 1), 4 * (count + 1), (count + 7) // 8, rows.header_key_bytes, rows.header_value_bytes)
    ]
    held = [_View(each, True) for each in (row_ends, *buffers)]
    cdef int32_t *ends = <int32_t *>(<_View>held[0]).bytes
    to.key_ends, to.value_ends = <int32_t *>(<_View>held[1]).bytes, <int32_t *>(<_View>held[2]).bytes
    to.present, to.keys, to.values = (<_View>held[3]).bytes, (<_View>held[4]).bytes, (<_View>held[5]).bytes
    cdef Py_ssize_t row, index, filled = 0
    cdef bint in_order = True
    with nogil:
        ends[0] = to.key_ends[0] = to.value_ends[0] = 0
        memset(to.present, 0, (count + 7) // 8)
        for row in range(group.row_count):
            ends[row + 1] = ends[row] + group.places.counts[row]
        for index in range(group.count):
            in_order = in_order and _copy_headers(&group.batches[index], &group.places, rows, &to, &filled)
    if not in_order:
        return None
    key_ends, value_ends, present, keys, values = buffers
    return row_ends, (None, key_ends, keys), (present if rows.null_header_values else None, value_ends, values)


# -- Arrow's buffers to records ------------------------------------------------------------------------------------


cdef struct Strings:
    const uint8_t *present  # a bit for each, or NULL if none is null
    const uint8_t *ends
    const uint8_t *data
    Py_ssize_t size
    Py_ssize_t first  # of the array in its buffers
    Py_ssize_t count
    bint is_wide


cdef inline bint _is_null(const uint8_t *present, Py_ssize_t index) noexcept nogil:
    return present != NULL and not (present[index >> 3] >> (index & 7)) & 1


cdef inline int64_t _end(const uint8_t *ends, bint is_wide, Py_ssize_t index) noexcept nogil:
    # Copied, because nothing says that a buffer starts at a multiple of its width.
    cdef int64_t wide
    cdef int32_t narrow
    if is_wide:
        memcpy(&wide, ends + 8 * index, 8)
        return wide
    memcpy(&narrow, ends + 4 * index, 4)
    return narrow


cdef inline bint _string(const Strings *column, Py_ssize_t row, const uint8_t **start, int64_t *length) noexcept nogil:
    """Whether the string lies within its buffer; its length is -1 for null."""
    cdef int64_t begin, end
    length[0] = -1
    start[0] = NULL
    row += column.first
    if column.ends == NULL or _is_null(column.present, row):
        return True
    begin, end = _end(column.ends, column.is_wide, row), _end(column.ends, column.is_wide, row + 1)
    if begin < 0 or begin > end or end > column.size or end - begin > INT32_MAX:
        return False
    length[0] = end - begin
    start[0] = column.data + begin
    return True


cdef class StringColumn:
    """A binary or large_binary array by its buffers: validity or None, offsets, and bytes."""

    cdef Strings strings
    cdef list views

    def __cinit__(self, list buffers, Py_ssize_t first, Py_ssize_t count, bint is_wide):
        validity, ends, data = buffers
        cdef _View present = _View(validity), offsets = _View(ends), content = _View(data)
        if first < 0 or count < 0 or (validity is not None and present.size < (first + count + 7) // 8):
            raise ValueError("The validity of an Arrow array is shorter than its rows.")
        if count and offsets.size < (8 if is_wide else 4) * (first + count + 1):
            raise ValueError("The offsets of an Arrow array are fewer than its rows.")
        self.views = [present, offsets, content]
        self.strings.present, self.strings.ends = present.bytes, offsets.bytes if count else NULL
        self.strings.data, self.strings.size = content.bytes, content.size
        self.strings.first, self.strings.count, self.strings.is_wide = first, count, is_wide

    @property
    def byte_count(self):
        """What the strings take together."""
        cdef const Strings *own = &self.strings
        cdef int64_t begin, end
        if own.count == 0:
            return 0
        begin, end = _end(own.ends, own.is_wide, own.first), _end(own.ends, own.is_wide, own.first + own.count)
        return end - begin if 0 <= begin <= end else 0


def murmur2(StringColumn keys, out):
    """Kafka's 32-bit murmur2 of each key into a buffer of uint32; the hash of a null is meaningless."""
    cdef _View hashes = _View(out, True)
    cdef Py_ssize_t row
    cdef const uint8_t *key
    cdef int64_t length
    cdef uint32_t mixed
    cdef bint in_order = True
    if hashes.size < 4 * keys.strings.count:
        raise ValueError("There is no room for the hashes.")
    with nogil:
        for row in range(keys.strings.count):
            in_order = in_order and _string(&keys.strings, row, &key, &length)
            mixed = _murmur2(key, length if in_order and length > 0 else 0)
            memcpy(hashes.bytes + 4 * row, &mixed, 4)
    if not in_order:
        raise ValueError("An offset of an Arrow array points outside of its bytes.")


cdef inline uint32_t _murmur2(const uint8_t *key, int64_t length) noexcept nogil:
    cdef uint32_t multiplier = 0x5BD1E995
    cdef uint32_t mixed = <uint32_t>0x9747B28C ^ <uint32_t>length
    cdef uint32_t word
    cdef int64_t at = 0
    while at + 4 <= length:
        word = key[at] | <uint32_t>key[at + 1] << 8 | <uint32_t>key[at + 2] << 16 | <uint32_t>key[at + 3] << 24
        word *= multiplier
        word = (word ^ word >> 24) * multiplier
        mixed = mixed * multiplier ^ word
        at += 4
    if at < length:
        word = 0
        while length > at:
            length -= 1
            word = word << 8 | key[length]
        mixed = (mixed ^ word) * multiplier
    mixed = (mixed ^ mixed >> 13) * multiplier
    return mixed ^ mixed >> 15


cdef struct Chunk:
    Py_ssize_t count
    const Strings *keys  # NULL where there is no such column
    const Strings *values
    const uint8_t *timestamps
    const uint8_t *timestamps_present
    Py_ssize_t timestamps_first
    const uint8_t *header_ends
    const uint8_t *headers_present
    Py_ssize_t headers_first
    const Strings *header_keys
    const Strings *header_values


cdef class Columns:
    """Some rows to be written: strings, and by their buffers the timestamps and the lists of headers."""

    cdef Chunk chunk
    cdef list held

    def __cinit__(self, StringColumn values, StringColumn keys=None, tuple timestamps=None, tuple headers=None):
        """Timestamps are (validity, bytes of int64, first row); headers (validity, ends, first row, keys, values)."""
        cdef _View present, content
        cdef StringColumn header_keys, header_values
        cdef Py_ssize_t count = values.strings.count
        self.chunk.count, self.chunk.values = count, &values.strings
        self.held = [values, keys]
        if keys is not None:
            if keys.strings.count != count:
                raise ValueError("There are not as many keys as values.")
            self.chunk.keys = &keys.strings
        if timestamps is not None:
            present, content = _View(timestamps[0]), _View(timestamps[1])
            self.chunk.timestamps_first = self.checked(present, content.size // 8, timestamps[2])
            self.chunk.timestamps_present, self.chunk.timestamps = present.bytes, content.bytes
            self.held += [present, content]
        if headers is not None:
            present, content = _View(headers[0]), _View(headers[1])
            header_keys, header_values = headers[3], headers[4]
            if header_keys.strings.count != header_values.strings.count:
                raise ValueError("There are not as many keys of headers as values.")
            self.chunk.headers_first = self.checked(present, content.size // 4 - 1, headers[2])
            self.chunk.headers_present, self.chunk.header_ends = present.bytes, content.bytes
            self.chunk.header_keys, self.chunk.header_values = &header_keys.strings, &header_values.strings
            self.held += [present, content, header_keys, header_values]

    cdef Py_ssize_t checked(self, _View present, Py_ssize_t there, Py_ssize_t first) except -1:
        """The first row of a column, after a look at whether its buffers hold so many."""
        if first < 0 or there < first + self.chunk.count:
            raise ValueError("A column of an Arrow table is shorter than the others.")
        if present.bytes != NULL and present.size < (first + self.chunk.count + 7) // 8:
            raise ValueError("The validity of an Arrow array is shorter than its rows.")
        return first

    @property
    def row_count(self):
        return self.chunk.count

    @property
    def bytes_max(self):
        """More than the records can take."""
        size = ROW_BYTES_MAX * self.chunk.count
        cdef StringColumn column
        for column in self.held[:2]:
            if column is not None:
                size += column.byte_count
        if self.chunk.header_ends != NULL:
            for column in self.held[-2:]:
                size += column.byte_count + HEADER_BYTES_MAX // 2 * column.strings.count
        return size


cdef int64_t _headers_size(const Chunk *chunk, int64_t first, int64_t count) noexcept nogil:
    """Bytes of so many headers from `first` on, or -1 if they do not lie in their buffers or one has no key."""
    cdef int64_t size = 0
    cdef int64_t index, length
    cdef const uint8_t *start
    for index in range(first, first + count):
        if not _string(chunk.header_keys, index, &start, &length) or length < 0:
            return -1
        size += _width(_zigzag(length)) + length
        if not _string(chunk.header_values, index, &start, &length):
            return -1
        size += _width(_zigzag(length)) + (length if length > 0 else 0)
    return size


cdef inline uint8_t *_write_string(uint8_t *to, const uint8_t *start, int64_t length) noexcept nogil:
    to = _write_varint(to, _zigzag(length))
    if length > 0:
        memcpy(to, start, length)
        to += length
    return to


cdef class Writer:
    """Writes records of one batch, as many as fit, into a buffer behind room for the batch's header."""

    cdef _View out
    cdef Py_ssize_t position
    cdef int64_t default_timestamp
    cdef readonly Py_ssize_t record_count
    cdef readonly int64_t base_timestamp
    cdef readonly int64_t max_timestamp
    cdef readonly int64_t refused_bytes
    """What the record takes that did not fit any more; 0 if there was none."""

    def __cinit__(self, out, Py_ssize_t first_byte, int64_t default_timestamp):
        self.out = _View(out, True)
        if not 0 <= first_byte <= self.out.size:
            raise ValueError("There is no room for the header of a batch.")
        self.position = first_byte
        self.default_timestamp = default_timestamp
        self.base_timestamp = self.max_timestamp = default_timestamp

    @property
    def end(self):
        """The byte behind the last record."""
        return self.position

    def close(self):
        """Let go of the buffer; nothing more can be written."""
        self.out = _View(None)
        self.position = 0

    def append(self, Columns columns, Py_ssize_t first):
        """Write rows from `first` on; returns how many, which is fewer than there are if the batch is full."""
        cdef Py_ssize_t row = max(first, 0)
        cdef Py_ssize_t start = row
        cdef int status = 1
        with nogil:
            while row < columns.chunk.count:
                status = self.write(&columns.chunk, row)
                if status != 1:
                    break
                row += 1
        if status < 0:
            raise ValueError("An offset of an Arrow array points outside of its bytes.")
        return row - start

    def append_row(self, int64_t timestamp, bytes key, bytes value, headers):
        """Write one record; headers are pairs of bytes, of which the second may be None. False if the batch is full."""
        cdef bytes part
        cdef _View key_view = _View(key), value_view = _View(value)
        cdef int64_t key_length = key_view.size if key is not None else -1
        cdef int64_t value_length = value_view.size if value is not None else -1
        cdef list parts = []  # a list of its own, which nobody can change before it is written
        cdef int64_t size = 0, length
        for name, content in headers:
            if name is None:
                raise ValueError("A header needs a name.")
            for part in (name, content):
                parts.append(_View(part) if part is not None else None)
                length = len(part) if part is not None else -1
                size += _width(_zigzag(length)) + max(length, 0)
        cdef uint8_t *to = self.begin(timestamp, key_length, value_length, len(parts) // 2, size)
        if to == NULL:
            return False
        to = _write_string(to, key_view.bytes, key_length)
        to = _write_string(to, value_view.bytes, value_length)
        to = _write_varint(to, _zigzag(len(parts) // 2))
        cdef _View view
        for view in parts:
            to = _write_string(to, NULL, -1) if view is None else _write_string(to, view.bytes, view.size)
        self.position = to - self.out.bytes
        return True

    cdef uint8_t *begin(
        self, int64_t timestamp, int64_t key_length, int64_t value_length, int64_t header_count, int64_t headers_size
    ) noexcept nogil:
        """Write what stands before the key if the whole record fits, or return NULL."""
        if self.record_count == 0:
            self.base_timestamp = self.max_timestamp = timestamp
        cdef uint64_t delta = _zigzag(<int64_t>(<uint64_t>timestamp - <uint64_t>self.base_timestamp))
        cdef uint64_t offset = _zigzag(self.record_count)
        cdef int64_t size = 1 + _width(delta) + _width(offset) + _width(_zigzag(header_count)) + headers_size
        size += _width(_zigzag(key_length)) + (key_length if key_length > 0 else 0)
        size += _width(_zigzag(value_length)) + (value_length if value_length > 0 else 0)
        cdef int64_t whole = size + _width(_zigzag(size))
        if whole > self.out.size - self.position or size > INT32_MAX:
            self.refused_bytes = whole
            return NULL
        cdef uint8_t *to = _write_varint(self.out.bytes + self.position, _zigzag(size))
        to[0] = 0  # the attributes
        to = _write_varint(to + 1, delta)
        to = _write_varint(to, offset)
        self.record_count += 1
        if timestamp > self.max_timestamp:
            self.max_timestamp = timestamp
        return to

    cdef int write(self, const Chunk *chunk, Py_ssize_t row) noexcept nogil:
        """1 if the record was written, 0 if it does not fit, -1 if the columns are damaged."""
        cdef const uint8_t *key = NULL
        cdef const uint8_t *value = NULL
        cdef const uint8_t *start
        cdef int64_t key_length = -1, value_length, length
        cdef int64_t timestamp = self.default_timestamp
        cdef int64_t first_header = 0, header_count = 0, headers_size = 0, index
        cdef Py_ssize_t at
        if chunk.keys != NULL and not _string(chunk.keys, row, &key, &key_length):
            return -1
        if not _string(chunk.values, row, &value, &value_length):
            return -1
        at = chunk.timestamps_first + row
        if chunk.timestamps != NULL and not _is_null(chunk.timestamps_present, at):
            memcpy(&timestamp, chunk.timestamps + 8 * at, 8)
        at = chunk.headers_first + row
        if chunk.header_ends != NULL and not _is_null(chunk.headers_present, at):
            first_header = _end(chunk.header_ends, False, at)
            header_count = _end(chunk.header_ends, False, at + 1) - first_header
            if first_header < 0 or header_count < 0 or first_header + header_count > chunk.header_keys.count:
                return -1
            headers_size = _headers_size(chunk, first_header, header_count)
            if headers_size < 0:
                return -1
        cdef uint8_t *to = self.begin(timestamp, key_length, value_length, header_count, headers_size)
        if to == NULL:
            return 0
        to = _write_string(to, key, key_length)
        to = _write_string(to, value, value_length)
        to = _write_varint(to, _zigzag(header_count))
        for index in range(first_header, first_header + header_count):
            _string(chunk.header_keys, index, &start, &length)
            to = _write_string(to, start, length)
            _string(chunk.header_values, index, &start, &length)
            to = _write_string(to, start, length)
        self.position = to - self.out.bytes
        return 1
