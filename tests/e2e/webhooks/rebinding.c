/* Changes the address of a host between two lookups (DNS rebinding). A server loads this library with LD_PRELOAD.
 *
 * The first lookup of HOST returns ALLOWED, and every later one returns PRIVATE. A connection to PRIVATE is refused. The
 * file in the environment variable REBINDING_LOG gets a line for each lookup of HOST and for each IPv4 connection. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define HOST "rebinding.test"
#define ALLOWED "127.0.0.1"
#define PRIVATE "10.0.0.1"

static void record(const char *what, const char *address) {
    const char *log = getenv("REBINDING_LOG");
    int file = log ? open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    if (file >= 0) {
        dprintf(file, "%s %s\n", what, address);
        close(file);
    }
}

int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints, struct addrinfo **result) {
    static atomic_uint lookups;
    int (*next)(const char *, const char *, const struct addrinfo *, struct addrinfo **);
    *(void **)&next = dlsym(RTLD_NEXT, "getaddrinfo");
    if (node && strcmp(node, HOST) == 0) {
        node = atomic_fetch_add(&lookups, 1) == 0 ? ALLOWED : PRIVATE;
        record("lookup", node);
    }
    return next(node, service, hints, result);
}

int connect(int socket, const struct sockaddr *address, socklen_t length) {
    int (*next)(int, const struct sockaddr *, socklen_t);
    *(void **)&next = dlsym(RTLD_NEXT, "connect");
    char text[INET_ADDRSTRLEN];
    if (address->sa_family == AF_INET
        && inet_ntop(AF_INET, &((const struct sockaddr_in *)address)->sin_addr, text, sizeof text)) {
        record("connect", text);
        if (strcmp(text, PRIVATE) == 0) {
            errno = ECONNREFUSED;
            return -1;
        }
    }
    return next(socket, address, length);
}
