/** Prints the size of the bundle, and fails if it is too large. */

import { readFileSync } from "node:fs";
import { gzipSync } from "node:zlib";

const MAX_SIZE = 6000;
const path = "dist/latchkey.js";
const bundle = readFileSync(new URL(path, import.meta.url));
const size = gzipSync(bundle, { level: 9 }).length;

console.log(`${path}: ${bundle.length} bytes, ${size} bytes with gzip (at most ${MAX_SIZE})`);
process.exitCode = size > MAX_SIZE ? 1 : 0;
