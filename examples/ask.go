// Send a prompt from Go, and print the answer as it comes.
//
//	go mod init ask && go get github.com/redis/go-redis/v9 && go run ask.go "The sky is blue because"
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/redis/go-redis/v9"
)

func env(name, otherwise string) string {
	if value := os.Getenv(name); value != "" {
		return value
	}
	return otherwise
}

func ask(ctx context.Context, client *redis.Client, pool, prompt string) error {
	entry, err := client.XAdd(ctx, &redis.XAddArgs{
		Stream: "hr:{" + pool + "}:q:normal",
		Values: []any{"prompt", prompt, "max_tokens", 64},
	}).Result()
	if err != nil {
		return err
	}
	log, last := "hr:{"+pool+"}:log:normal-"+entry, "0"
	for {
		streams, err := client.XRead(ctx, &redis.XReadArgs{Streams: []string{log, last}, Block: 10 * time.Second}).Result()
		if errors.Is(err, redis.Nil) { // an answer may be slow: ask again
			continue
		}
		if err != nil {
			return err
		}
		for _, event := range streams[0].Messages {
			last = event.ID
			switch event.Values["type"] {
			case "delta":
				if choice, several := event.Values["i"]; !several || choice == "0" {
					fmt.Print(event.Values["text"])
				}
			case "end":
				fmt.Println()
				if event.Values["status"] != "done" {
					return fmt.Errorf("%v: %v", event.Values["status"], event.Values["error"])
				}
				return nil
			}
		}
	}
}

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: ask PROMPT")
		os.Exit(2)
	}
	// An XADD whose reply was lost must not be sent again by itself: it would be a second job.
	client := redis.NewClient(&redis.Options{Addr: env("REDIS_ADDR", "127.0.0.1:7379"), MaxRetries: -1})
	if err := ask(context.Background(), client, env("POOL", "smollm2"), os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
