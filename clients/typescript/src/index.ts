export { createPkce, Latchkey, type Options, type RedirectOptions } from "./client.js";
export { ApiError, ConnectionError, NoSessionError, type ErrorCode, type FieldProblem } from "./errors.js";
export type { components, operations, paths } from "./openapi.js";
export type { MethodOf, Path, RequestArguments, RequestOptions, ResponseOf, Schemas, Transport } from "./request.js";
export type { Clock, Session, SessionInfo, Tokens } from "./session.js";
export { localStorageStore, memoryStore, type SessionStore } from "./store.js";
