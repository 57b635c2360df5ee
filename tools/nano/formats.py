"""Number formats and files of the official checkpoint: FP8, FP4, E8M0, BF16 and safetensors, with numpy alone."""
import json, struct
import numpy as np

E4M3 = np.array([(m * 2.0 ** -9) if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127])  # 0..448
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
ITEM = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "I64": 8, "I32": 4}
NUMPY = {"F32": np.float32, "BF16": np.uint16, "F8_E4M3": np.uint8, "F8_E8M0": np.uint8, "I8": np.uint8, "I64": np.int64, "I32": np.int32}


def to_bf16(x):
    """f32 -> BF16 bits, round to nearest even."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def nearest_code(magnitude, table):
    """Index of the nearest entry; ties go to the even index, which is the even mantissa."""
    high = np.searchsorted(table, magnitude, side="left").clip(1, len(table) - 1)
    below, above = magnitude - table[high - 1], table[high] - magnitude
    return np.where((above < below) | ((above == below) & (high % 2 == 0)), high, high - 1)


def scale_byte(largest, limit):
    """E8M0 byte of the smallest power of two s with largest / s <= limit."""
    exponent = np.ceil(np.log2(np.maximum(largest, 2.0 ** -100) / limit)).astype(np.int64)
    return (exponent + 127).clip(0, 254).astype(np.uint8)


def quantize_fp8(w):
    """[rows, cols] -> E4M3 codes of the same shape and one E8M0 byte per 128 x 128 cell."""
    rows, cols = w.shape
    if rows % 128 or cols % 128: raise ValueError(f"FP8 matrix of {rows} x {cols}: both must be multiples of 128")
    blocks = w.astype(np.float64).reshape(rows // 128, 128, cols // 128, 128)
    scale = scale_byte(np.abs(blocks).max(axis=(1, 3)), 448.0)
    x = blocks / np.exp2(scale.astype(np.float64) - 127)[:, None, :, None]
    code = nearest_code(np.abs(x).clip(0, 448), E4M3).astype(np.uint8) | (np.signbit(x).astype(np.uint8) << 7)
    return code.reshape(rows, cols), scale


def quantize_fp4(w):
    """[rows, cols] -> packed E2M1 (low nibble = even column) [rows, cols / 2] and one E8M0 byte per 32 columns."""
    rows, cols = w.shape
    if cols % 32: raise ValueError(f"FP4 matrix of {rows} x {cols}: columns must be a multiple of 32")
    blocks = w.astype(np.float64).reshape(rows, cols // 32, 32)
    scale = scale_byte(np.abs(blocks).max(axis=2), 6.0)
    x = blocks / np.exp2(scale.astype(np.float64) - 127)[:, :, None]
    code = nearest_code(np.abs(x).clip(0, 6), E2M1).astype(np.uint8) | (np.signbit(x).astype(np.uint8) << 3)
    code = code.reshape(rows, cols // 2, 2)
    return (code[..., 0] | (code[..., 1] << 4)).astype(np.uint8), scale


FP8_VALUES = np.concatenate([E4M3, [np.nan], -E4M3, [np.nan]]).astype(np.float32)
FP4_VALUES = np.concatenate([E2M1, -E2M1]).astype(np.float32)


def dequantize(dtype, stored, scale):
    """The exact f32 values of a stored tensor (every product is representable)."""
    if dtype == "BF16": return from_bf16(stored)
    if dtype in ("F32", "I64", "I32"): return stored
    factor = np.exp2(scale.astype(np.float32) - 127)
    if dtype == "F8_E4M3": return FP8_VALUES[stored] * np.repeat(np.repeat(factor, 128, 0), 128, 1)
    if dtype == "I8":
        return np.stack([FP4_VALUES[stored & 15], FP4_VALUES[stored >> 4]], -1).reshape(stored.shape[0], -1) * np.repeat(factor, 32, 1)
    raise ValueError(f"no rule for dtype {dtype}")


def write_safetensors(path, tensors, metadata=None):
    """`tensors`: list of (name, (dtype, array)). Returns the bytes of data written."""
    header, offset, data = ({"__metadata__": metadata} if metadata else {}), 0, []
    for name, (dtype, array) in tensors:
        raw = np.ascontiguousarray(array).tobytes()
        if len(raw) != ITEM[dtype] * array.size: raise ValueError(f"{name}: {len(raw)} bytes do not fit {array.size} elements of {dtype}")
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + len(raw)]}
        offset += len(raw); data.append(raw)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text))); f.write(text)
        for raw in data: f.write(raw)
    return offset


def read_safetensors(path):
    """name -> (dtype, array) of the stored bits."""
    raw = open(path, "rb").read()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:8 + size]); header.pop("__metadata__", None)
    out = {}
    for name, entry in header.items():
        a, b = entry["data_offsets"]
        out[name] = (entry["dtype"], np.frombuffer(raw[8 + size + a:8 + size + b], NUMPY[entry["dtype"]]).reshape(entry["shape"]))
    return out
