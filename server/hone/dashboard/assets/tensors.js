// Files and text as tensors: JSON, NumPy's .npy, pictures. Sizes and datatypes are the model's.

const ARRAYS = {
  BOOL: Uint8Array, UINT8: Uint8Array, UINT16: Uint16Array, UINT32: Uint32Array, UINT64: BigUint64Array,
  INT8: Int8Array, INT16: Int16Array, INT32: Int32Array, INT64: BigInt64Array, FP32: Float32Array, FP64: Float64Array,
};
/** NumPy's type codes -> how to read them; the protocol's names where bytes can be passed on as they are. */
const NUMPY = {
  b1: "BOOL", u1: "UINT8", u2: "UINT16", u4: "UINT32", u8: "UINT64", i1: "INT8", i2: "INT16", i4: "INT32", i8: "INT64",
  f2: "FP16", f4: "FP32", f8: "FP64",
};
const MAX_PIXELS = 64 << 20;

/** {shape, bytes} for binary data or {shape, data} for JSON. `spec` is an input of the model's metadata. */
export async function readFile(file, spec) {
  const name = file.name.toLowerCase();
  if (name.endsWith(".npy")) return readNumpy(await file.arrayBuffer(), spec);
  if (name.endsWith(".json")) return readJson(await file.text(), spec);
  if (/\.(png|jpe?g|webp|gif|bmp)$/.test(name)) return readPicture(file, spec);
  throw new Error(`${file.name}: expected .npy, .json or a picture (.png, .jpg, .webp, .gif, .bmp)`);
}

export function readJson(text, spec) {
  let data;
  try {
    data = JSON.parse(text);
  } catch (problem) {
    throw new Error(`'${spec.name}' is not JSON: ${problem.message}`);
  }
  const found = shapeOf(data, spec.name);
  // A flat list is taken in the model's own shape, where that is known.
  const flat = data.flat(Infinity);
  const fixed = spec.shape.map((dim, index) => (dim < 0 && index === 0 ? 1 : dim));
  const isFlat = found.length === 1 && fixed.every((dim) => dim > 0) && size(fixed) === flat.length;
  return { shape: isFlat ? fixed : fitted(found, spec), data: flat };
}

function shapeOf(data, name) {
  const shape = [];
  for (let level = data; Array.isArray(level); [level] = level) shape.push(level.length);
  if (!shape.length) throw new Error(`'${name}': expected a list of numbers, or of lists`);
  if (data.flat(Infinity).length !== size(shape)) throw new Error(`'${name}': its lists are not all of the same length`);
  return shape;
}

/** The shape with what the model wants in front (a batch of one), or as it is. Raises where it cannot fit. */
function fitted(shape, spec) {
  const wanted = spec.shape;
  const longer = shape.length === wanted.length - 1 ? [1, ...shape] : shape;
  if (longer.length !== wanted.length || wanted.some((dim, index) => dim >= 0 && dim !== longer[index])) {
    throw new Error(`'${spec.name}': expected shape [${wanted.join(", ")}] (-1 is any), found [${shape.join(", ")}]`);
  }
  return longer;
}

function size(shape) {
  return shape.reduce((product, dim) => product * dim, 1);
}

/** NumPy's format 1 to 3: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html */
export function readNumpy(buffer, spec) {
  const view = new DataView(buffer);
  const magic = String.fromCharCode(...new Uint8Array(buffer, 0, Math.min(6, buffer.byteLength)));
  if (magic !== "\x93NUMPY") throw new Error(`'${spec.name}': not a .npy file`);
  const isOld = view.getUint8(6) === 1;
  const length = isOld ? view.getUint16(8, true) : view.getUint32(8, true);
  const begin = isOld ? 10 : 12;
  const head = new TextDecoder().decode(new Uint8Array(buffer, begin, length));
  const code = /'descr':\s*'([<>|=])(\w+)'/.exec(head);
  const shapeText = /'shape':\s*\(([^)]*)\)/.exec(head);
  const datatype = code && NUMPY[code[2]];
  if (!datatype || !shapeText || code[1] === ">") throw new Error(`'${spec.name}': a .npy of this kind is not read here: ${head.trim()}`);
  if (/'fortran_order':\s*True/.test(head)) throw new Error(`'${spec.name}': saved in Fortran's order; save np.ascontiguousarray(...) of it`);
  const shape = fitted(shapeText[1].split(",").map((part) => part.trim()).filter(Boolean).map(Number), spec);
  const bytes = buffer.slice(begin + length);
  if (datatype === spec.datatype) return { shape, bytes };
  if (!ARRAYS[datatype]) throw new Error(`'${spec.name}': expected ${spec.datatype}, found ${datatype}`);
  return { shape, bytes: convert(new ARRAYS[datatype](bytes), spec) };
}

function convert(values, spec) {
  const Wanted = ARRAYS[spec.datatype];
  if (!Wanted) throw new Error(`'${spec.name}': ${spec.datatype} is not made here; give a .npy of just that type, or JSON`);
  const isBig = Wanted === BigInt64Array || Wanted === BigUint64Array;
  const found = new Wanted(values.length);
  for (let index = 0; index < values.length; index += 1) found[index] = isBig ? BigInt(values[index]) : Number(values[index]);
  const isInteger = !spec.datatype.startsWith("FP");
  if (isInteger) {
    const lost = found.findIndex((value, index) => Number(value) !== Number(values[index]));
    if (lost >= 0) throw new Error(`'${spec.name}': ${values[lost]} is no ${spec.datatype}`);
  }
  return found.buffer;
}

/** A picture at the model's size: channels in front or behind, 0 to 1 for floats; sizes that are free stay as they are. */
async function readPicture(file, spec) {
  const { datatype } = spec;
  const dims = spec.shape.length === 4 ? spec.shape.slice(1) : spec.shape;
  const isFirst = dims.length === 3 && (dims[0] === 1 || dims[0] === 3);
  if (dims.length !== 3 || !(isFirst || dims[2] === 1 || dims[2] === 3)) {
    throw new Error(`'${spec.name}': a picture does not fit shape [${spec.shape.join(", ")}]`);
  }
  if (!ARRAYS[datatype]) throw new Error(`'${spec.name}': pictures are not made into ${datatype} here`);
  const image = await createImageBitmap(file, { colorSpaceConversion: "none" }).catch(() => {
    throw new Error(`${file.name}: not a picture that this browser reads`);
  });
  if (image.width * image.height > MAX_PIXELS) throw new Error(`${file.name}: more than ${MAX_PIXELS} pixels`);
  const canvas = new OffscreenCanvas(image.width, image.height);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(image, 0, 0);
  const pixels = context.getImageData(0, 0, image.width, image.height).data;
  const channels = isFirst ? dims[0] : dims[2];
  const [height, width] = (isFirst ? dims.slice(1) : dims.slice(0, 2)).map((dim, index) => (dim > 0 ? dim : [image.height, image.width][index]));
  const planes = resize(split(pixels, channels), image.width, image.height, width, height);
  const found = new ARRAYS[datatype](channels * height * width);
  const isFloat = datatype.startsWith("FP");
  for (let channel = 0; channel < channels; channel += 1) {
    for (let at = 0; at < height * width; at += 1) {
      const value = Math.round(planes[channel][at]);
      const number = isFloat ? value / 255 : value;
      found[isFirst ? channel * height * width + at : at * channels + channel] = found instanceof BigInt64Array || found instanceof BigUint64Array ? BigInt(number) : number;
    }
  }
  const shape = isFirst ? [channels, height, width] : [height, width, channels];
  return { shape: spec.shape.length === 4 ? [1, ...shape] : shape, bytes: found.buffer };
}

/** RGBA -> planes; one channel is the luma of ITU-R 601. */
function split(pixels, channels) {
  const num = pixels.length / 4;
  const planes = Array.from({ length: channels }, () => new Float32Array(num));
  for (let at = 0; at < num; at += 1) {
    const [red, green, blue] = [pixels[4 * at], pixels[4 * at + 1], pixels[4 * at + 2]];
    if (channels === 1) planes[0][at] = (299 * red + 587 * green + 114 * blue) / 1000;
    else [planes[0][at], planes[1][at], planes[2][at]] = [red, green, blue];
  }
  return planes;
}

/** Each new pixel is the mean of the area that it covers, as `hone infer` does it. */
function resize(planes, width, height, newWidth, newHeight) {
  if (width === newWidth && height === newHeight) return planes;
  return planes.map((plane) => {
    const rows = shrink(plane, width, height, newWidth, 1, width);
    return shrink(rows, height, newWidth, newHeight, newWidth, 1);
  });
}

/** Along one axis: `step` apart lie its elements, `stride` apart its lines. */
function shrink(plane, length, lines, newLength, step, stride) {
  const isRow = step === 1;
  const found = new Float32Array(newLength * lines);
  const scale = length / newLength;
  for (let at = 0; at < newLength; at += 1) {
    const begin = at * scale;
    const end = Math.max(begin + 1e-6, (at + 1) * scale);
    const first = Math.floor(begin);
    const last = Math.min(length, Math.ceil(end));
    for (let line = 0; line < lines; line += 1) {
      let sum = 0;
      for (let from = first; from < last; from += 1) {
        const share = Math.min(end, from + 1) - Math.max(begin, from);
        sum += plane[from * step + line * stride] * share;
      }
      found[isRow ? line * newLength + at : at * lines + line] = sum / (end - begin);
    }
  }
  return found;
}
