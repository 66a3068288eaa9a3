import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import ts from "typescript";

const root = fileURLToPath(new URL("../../", import.meta.url));

/** The names that examples use without declaring them, and their types. */
const CONTEXT: Record<string, string> = {
  latchkey: 'import("@latchkey/client").Latchkey',
  ApiError: 'typeof import("@latchkey/client").ApiError',
  name: "string",
  email: "string",
  password: "string",
  show: "(field: string, message: string) => void",
};

test("the examples of the README compile", () => {
  const examples = readFileSync(`${root}README.md`, "utf8").split("```ts\n").slice(1).map((text) => text.split("```")[0]!);
  assert.ok(examples.length >= 5, `${examples.length} examples`);
  const sources = new Map<string, string>();
  for (const [index, example] of examples.entries()) {
    const isDeclared = (name: string) => new RegExp(`const ${name}\\b|import [^"]*\\b${name}\\b`).test(example);
    const missing = Object.entries(CONTEXT).filter(([name]) => !isDeclared(name));
    const context = missing.map(([name, type]) => `declare const ${name}: ${type};\n`).join("");
    sources.set(`${root}test/example-${index}.ts`, `${context}${example}\nexport {};\n`);
  }
  const options: ts.CompilerOptions = {
    target: ts.ScriptTarget.ES2022,
    module: ts.ModuleKind.NodeNext,
    moduleResolution: ts.ModuleResolutionKind.NodeNext,
    types: ["node"],
    strict: true,
    noEmit: true,
  };
  const host = ts.createCompilerHost(options);
  const { fileExists, readFile, getSourceFile } = host;
  host.getCurrentDirectory = () => root;
  host.fileExists = (path) => sources.has(path) || fileExists.call(host, path);
  host.readFile = (path) => sources.get(path) ?? readFile.call(host, path);
  host.getSourceFile = (path, language, ...rest) => {
    const source = sources.get(path);
    return source === undefined
      ? getSourceFile.call(host, path, language, ...rest)
      : ts.createSourceFile(path, source, language);
  };
  const diagnostics = ts.getPreEmitDiagnostics(ts.createProgram([...sources.keys()], options, host));
  assert.equal(ts.formatDiagnostics(diagnostics, host), "");
});
