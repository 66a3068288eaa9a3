// A web application that signs in users with go-oidc.
package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"

	"github.com/coreos/go-oidc/v3/oidc"
	"golang.org/x/oauth2"
)

// login is what the application remembers of a login that has begun.
type login struct {
	nonce, verifier string
}

// session is the user who is signed in. The application has one user at a time.
type session struct {
	Claims       map[string]any `json:"claims"`
	AccessToken  string         `json:"access_token"`
	RefreshToken string         `json:"refresh_token"`
	IDToken      string         `json:"id_token"`
}

type application struct {
	provider *oidc.Provider
	verifier *oidc.IDTokenVerifier
	config   oauth2.Config
	// The URL at the provider that logs out.
	endSession string

	mutex   sync.Mutex
	logins  map[string]login
	session *session
}

var errNobody = errors.New("nobody is signed in")

func main() {
	app, err := newApplication(context.Background())
	if err != nil {
		log.Fatal(err)
	}
	http.HandleFunc("GET /{$}", app.withSession(func(_ context.Context, session *session) (any, error) {
		return session, nil
	}))
	http.HandleFunc("GET /sign-in", app.signIn)
	http.HandleFunc("GET /callback", app.callback)
	http.HandleFunc("GET /refresh", app.withSession(app.refresh))
	http.HandleFunc("GET /userinfo", app.withSession(app.userInfo))
	http.HandleFunc("GET /sign-out", app.signOut)
	http.HandleFunc("GET /signed-out", func(response http.ResponseWriter, _ *http.Request) {
		respond(response, map[string]bool{"signed_out": true}, nil)
	})
	log.Fatal(http.ListenAndServe(net.JoinHostPort(os.Getenv("LISTEN_HOST"), os.Getenv("LISTEN_PORT")), nil))
}

func newApplication(ctx context.Context) (*application, error) {
	provider, err := oidc.NewProvider(ctx, os.Getenv("ISSUER"))
	if err != nil {
		return nil, err
	}
	var metadata struct {
		EndSession string `json:"end_session_endpoint"`
	}
	if err := provider.Claims(&metadata); err != nil {
		return nil, err
	}
	return &application{
		provider: provider,
		verifier: provider.Verifier(&oidc.Config{ClientID: os.Getenv("CLIENT_ID")}),
		config: oauth2.Config{
			ClientID:     os.Getenv("CLIENT_ID"),
			ClientSecret: os.Getenv("CLIENT_SECRET"),
			Endpoint:     provider.Endpoint(),
			RedirectURL:  os.Getenv("BASE_URL") + "/callback",
			Scopes:       strings.Fields(os.Getenv("SCOPES")),
		},
		endSession: metadata.EndSession,
		logins:     map[string]login{},
	}, nil
}

func (app *application) signIn(response http.ResponseWriter, request *http.Request) {
	state, begun := rand.Text(), login{nonce: rand.Text(), verifier: oauth2.GenerateVerifier()}
	app.mutex.Lock()
	app.logins[state] = begun
	app.mutex.Unlock()
	location := app.config.AuthCodeURL(state, oidc.Nonce(begun.nonce), oauth2.S256ChallengeOption(begun.verifier))
	http.Redirect(response, request, location, http.StatusSeeOther)
}

func (app *application) callback(response http.ResponseWriter, request *http.Request) {
	session, err := app.finish(request.Context(), request.URL.Query())
	if err != nil {
		respond(response, nil, err)
		return
	}
	app.setSession(session)
	http.Redirect(response, request, "/", http.StatusSeeOther)
}

// finish exchanges the code of a login.
func (app *application) finish(ctx context.Context, query url.Values) (*session, error) {
	app.mutex.Lock()
	begun, known := app.logins[query.Get("state")]
	delete(app.logins, query.Get("state"))
	app.mutex.Unlock()
	if !known {
		return nil, errors.New("unknown state")
	}
	if code := query.Get("error"); code != "" {
		return nil, fmt.Errorf("%s: %s", code, query.Get("error_description"))
	}
	// RFC 9207: the response of another provider is refused.
	if query.Get("iss") != os.Getenv("ISSUER") {
		return nil, fmt.Errorf("the response is from %q", query.Get("iss"))
	}
	token, err := app.config.Exchange(ctx, query.Get("code"), oauth2.VerifierOption(begun.verifier))
	if err != nil {
		return nil, err
	}
	session, idToken, err := app.verify(ctx, token)
	if err != nil {
		return nil, err
	}
	if idToken.Nonce != begun.nonce {
		return nil, errors.New("the nonce is wrong")
	}
	return session, nil
}

func (app *application) verify(ctx context.Context, token *oauth2.Token) (*session, *oidc.IDToken, error) {
	raw, ok := token.Extra("id_token").(string)
	if !ok {
		return nil, nil, errors.New("no ID token")
	}
	idToken, err := app.verifier.Verify(ctx, raw)
	if err != nil {
		return nil, nil, err
	}
	if err := idToken.VerifyAccessToken(token.AccessToken); err != nil {
		return nil, nil, err
	}
	verified := session{AccessToken: token.AccessToken, RefreshToken: token.RefreshToken, IDToken: raw}
	if err := idToken.Claims(&verified.Claims); err != nil {
		return nil, nil, err
	}
	return &verified, idToken, nil
}

func (app *application) refresh(ctx context.Context, before *session) (any, error) {
	token, err := app.config.TokenSource(ctx, &oauth2.Token{RefreshToken: before.RefreshToken}).Token()
	if err != nil {
		return nil, err
	}
	refreshed, _, err := app.verify(ctx, token)
	if err != nil {
		return nil, err
	}
	app.setSession(refreshed)
	return refreshed, nil
}

func (app *application) userInfo(ctx context.Context, session *session) (any, error) {
	source := oauth2.StaticTokenSource(&oauth2.Token{AccessToken: session.AccessToken})
	info, err := app.provider.UserInfo(ctx, source)
	if err != nil {
		return nil, err
	}
	var claims map[string]any
	if err := info.Claims(&claims); err != nil {
		return nil, err
	}
	return map[string]any{"claims": claims}, nil
}

func (app *application) signOut(response http.ResponseWriter, request *http.Request) {
	app.mutex.Lock()
	ended := app.session
	app.session = nil
	app.mutex.Unlock()
	if ended == nil {
		respond(response, nil, errNobody)
		return
	}
	query := url.Values{
		"id_token_hint":            {ended.IDToken},
		"post_logout_redirect_uri": {os.Getenv("BASE_URL") + "/signed-out"},
	}
	http.Redirect(response, request, app.endSession+"?"+query.Encode(), http.StatusSeeOther)
}

func (app *application) setSession(session *session) {
	app.mutex.Lock()
	defer app.mutex.Unlock()
	app.session = session
}

// withSession answers with the result of a function that needs a user.
func (app *application) withSession(answer func(context.Context, *session) (any, error)) http.HandlerFunc {
	return func(response http.ResponseWriter, request *http.Request) {
		app.mutex.Lock()
		current := app.session
		app.mutex.Unlock()
		if current == nil {
			respond(response, nil, errNobody)
			return
		}
		body, err := answer(request.Context(), current)
		respond(response, body, err)
	}
}

func respond(response http.ResponseWriter, body any, err error) {
	response.Header().Set("Content-Type", "application/json")
	if err != nil {
		log.Print(err)
		status := http.StatusInternalServerError
		if errors.Is(err, errNobody) {
			status = http.StatusUnauthorized
		}
		response.WriteHeader(status)
		body = map[string]string{"error": err.Error()}
	}
	if err := json.NewEncoder(response).Encode(body); err != nil {
		log.Print(err)
	}
}
