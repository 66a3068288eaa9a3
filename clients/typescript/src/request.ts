import { ApiError, ConnectionError } from "./errors.js";
import type { components, paths } from "./openapi.js";

export const DEFAULT_TIMEOUT = 10_000;

export type Schemas = components["schemas"];
export type Method = "get" | "post" | "patch" | "delete";
export type Path = keyof paths;
export type MethodOf<P extends Path> = { [M in Method]: paths[P][M] extends object ? M : never }[Method];
type Operation<P extends Path, M extends Method> = NonNullable<paths[P][M]>;

type JsonOf<T> = T extends { content: { "application/json": infer Body } } ? Body : never;
type BodyOf<O> = O extends { requestBody?: infer Body } ? JsonOf<NonNullable<Body>> : never;
type QueryOf<O> = O extends { parameters: { query?: infer Query } } ? NonNullable<Query> : never;
type NamesIn<P extends string> = P extends `${string}{${infer Name}}${infer Rest}` ? Name | NamesIn<Rest> : never;
type ParametersOf<P extends Path> = Record<Exclude<NamesIn<P>, "APPID">, string>;

/** The JSON of the response to an operation. */
export type ResponseOf<P extends Path, M extends Method> =
  Operation<P, M> extends { responses: { 200: infer Response } } ? JsonOf<Response> : never;

export type RequestOptions<P extends Path, M extends Method> = {
  /** The parameters in the path, except for the appID. */
  path?: ParametersOf<P>;
  query?: QueryOf<Operation<P, M>>;
  body?: BodyOf<Operation<P, M>>;
  /** The Bearer token. */
  token?: string;
  signal?: AbortSignal;
  credentials?: RequestCredentials;
} & (NamesIn<P> extends "APPID" ? unknown : { path: ParametersOf<P> }) &
  (Operation<P, M> extends { parameters: { query: object } } ? { query: QueryOf<Operation<P, M>> } : unknown) &
  (Operation<P, M> extends { requestBody: object } ? { body: BodyOf<Operation<P, M>> } : unknown);

/** The options can be left out if the operation needs none. */
export type RequestArguments<P extends Path, M extends Method> =
  Record<never, never> extends RequestOptions<P, M>
    ? [options?: RequestOptions<P, M>]
    : [options: RequestOptions<P, M>];

export interface Transport {
  /** The base URL of the installation, for example `https://auth.example.com`. */
  url: string;
  /** The appID. */
  app: string;
  fetch?: typeof fetch;
  /** Limit for a call, in milliseconds; default 10,000. */
  timeout?: number;
}

/** Sends a request. Throws an `ApiError` or a `ConnectionError`. */
export async function request<P extends Path, M extends MethodOf<P>>(
  transport: Transport,
  method: M,
  path: P,
  ...[options = {} as RequestOptions<P, M>]: RequestArguments<P, M>
): Promise<ResponseOf<P, M>> {
  const { body, token, signal, credentials } = options;
  const timeout = AbortSignal.timeout(transport.timeout ?? DEFAULT_TIMEOUT);
  const headers = new Headers();
  if (token !== undefined) headers.set("Authorization", `Bearer ${token}`);
  if (body !== undefined) headers.set("Content-Type", "application/json");
  let response: Response;
  let text: string;
  try {
    response = await (transport.fetch ?? fetch)(urlOf(transport, path, options), {
      method: method.toUpperCase(),
      headers,
      signal: signal ? AbortSignal.any([signal, timeout]) : timeout,
      ...(body !== undefined && { body: JSON.stringify(body) }),
      ...(credentials && { credentials }),
    });
    text = await response.text();
  } catch (cause) {
    signal?.throwIfAborted();
    throw new ConnectionError("no response from Latchkey", { cause });
  }
  let json: unknown;
  try {
    json = JSON.parse(text);
  } catch {
    // `errorOf` reports a response that is not JSON.
  }
  if (response.ok && typeof json === "object" && json !== null) return json as ResponseOf<P, M>;
  throw errorOf(response, json);
}

/** Returns the URL of an operation. */
export function urlOf(
  transport: Transport,
  path: string,
  options: { path?: Record<string, string>; query?: object },
): string {
  const parameters: Record<string, string> = { ...options.path, APPID: transport.app };
  const filled = path.replace(/\{(\w+)\}/g, (_, name: string) => encodeURIComponent(parameters[name] ?? ""));
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(options.query ?? {})) {
    if (value !== undefined) query.set(name, String(value));
  }
  const search = query.toString();
  return transport.url.replace(/\/+$/, "") + filled + (search && `?${search}`);
}

function errorOf(response: Response, json: unknown): ApiError {
  const body = (json ?? {}) as Partial<Schemas["Error"]>;
  const retryAfter = Number.parseInt(response.headers.get("Retry-After") ?? "", 10);
  const isFromLatchkey = !response.ok && typeof body.error === "string";
  return new ApiError(
    (isFromLatchkey && body.error_description) || `unexpected response with status ${response.status}`,
    response.status,
    isFromLatchkey ? body.error! : "unexpected_response",
    body.fields,
    Number.isNaN(retryAfter) ? undefined : retryAfter,
    response.headers.get("X-Request-Id") ?? body.request_id,
  );
}
