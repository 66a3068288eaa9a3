import type { components } from "./openapi.js";

export type ErrorCode = components["schemas"]["ErrorCode"];
export type FieldProblem = components["schemas"]["FieldProblem"];

/** The server returned an error. */
export class ApiError extends Error {
  override readonly name = "ApiError";

  constructor(
    message: string,
    readonly status: number,
    /** `unexpected_response`: the response is not from Latchkey, for example the error page of a proxy. */
    readonly code: ErrorCode | "unexpected_response",
    /** The invalid fields of the request. */
    readonly fields: readonly FieldProblem[] = [],
    /** Seconds to wait before the next attempt. */
    readonly retryAfter?: number,
    readonly requestId?: string,
  ) {
    super(message);
  }
}

/** No response arrived; `cause` has the reason. It is unknown whether the server handled the request. */
export class ConnectionError extends Error {
  override readonly name = "ConnectionError";
}

/** Nobody is logged in, or the session has ended. */
export class NoSessionError extends Error {
  override readonly name = "NoSessionError";

  constructor() {
    super("there is no session");
  }
}
