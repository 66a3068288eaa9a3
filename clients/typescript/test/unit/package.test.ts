import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { test } from "node:test";

const root = new URL("../../", import.meta.url);

test("the package has no dependency at run time and is not published", () => {
  const manifest = JSON.parse(readFileSync(new URL("package.json", root), "utf8")) as Record<string, unknown>;
  for (const kind of ["dependencies", "peerDependencies", "optionalDependencies", "bundleDependencies"]) {
    assert.equal(manifest[kind], undefined, kind);
  }
  assert.equal(manifest.private, true);
});

test("the lock file does not name a registry", () => {
  assert.ok(!readFileSync(new URL("package-lock.json", root), "utf8").includes('"resolved"'));
});

test("src/openapi.ts is generated from the current docs/openapi.json (if not: npm run generate)", () => {
  execFileSync("npm", ["run", "--silent", "generate", "--", "--check"], { cwd: root, stdio: "pipe" });
});
