// Receives events of Latchkey and prints each one as a line of JSON.
//
// WEBHOOK_KEY: the key `current` of the webhook's Secret. PORT: where to listen; 8000 by default.
package main

import (
	"cmp"
	"encoding/json"
	"io"
	"log"
	"net/http"
	"os"
	"time"

	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"
)

const maxBody = 1024 * 1024

type event struct {
	ID        string    `json:"id"`
	Type      string    `json:"type"`
	Timestamp time.Time `json:"timestamp"`
	Data      struct {
		App       string         `json:"app"`
		UserID    *string        `json:"user_id"`
		SessionID *string        `json:"session_id"`
		Version   *int64         `json:"version"`
		Detail    map[string]any `json:"detail"`
		// Only if the webhook includes Profile.
		User *user `json:"user,omitempty"`
	} `json:"data"`
}

type user struct {
	Email         *string `json:"email"`
	EmailVerified bool    `json:"email_verified"`
	Name          string  `json:"name"`
	State         string  `json:"state"`
	ExternalID    *string `json:"external_id"`
	Version       int64   `json:"version"`
}

func main() {
	key := os.Getenv("WEBHOOK_KEY")
	// The library accepts an empty key, with which everybody can sign. The shortest key is whsec_ and 32 characters.
	if len(key) < len("whsec_")+32 {
		log.Fatal("WEBHOOK_KEY is missing or too short")
	}
	webhook, err := standardwebhooks.NewWebhook(key)
	if err != nil {
		log.Fatal(err)
	}
	handler := func(response http.ResponseWriter, request *http.Request) {
		// The signature covers the bytes of the body, so verify these bytes, not JSON that was parsed and written again.
		body, err := io.ReadAll(http.MaxBytesReader(response, request.Body, maxBody))
		if err == nil {
			err = webhook.Verify(body, request.Header)
		}
		received := event{}
		if err == nil {
			err = json.Unmarshal(body, &received)
		}
		if err != nil {
			log.Printf("refused: %v", err)
			response.WriteHeader(http.StatusBadRequest)
			return
		}
		received.ID = request.Header.Get("webhook-id")
		// Store the event here, before the response: after a 2xx, Latchkey does not send it again.
		if err := json.NewEncoder(os.Stdout).Encode(received); err != nil {
			log.Fatal(err)
		}
		response.WriteHeader(http.StatusNoContent)
	}
	server := http.Server{
		Addr:        ":" + cmp.Or(os.Getenv("PORT"), "8000"),
		Handler:     http.HandlerFunc(handler),
		ReadTimeout: 10 * time.Second,
	}
	log.Fatal(server.ListenAndServe())
}
