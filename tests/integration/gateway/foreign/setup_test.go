// In place of their own, which starts Redis in a container and a server, and makes a token as this does.

package client

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"testing"
)

var (
	Host      = "127.0.0.1"
	Port, _   = strconv.Atoi(os.Getenv("TEST_PORT"))
	Namespace = "client-ns"
	Token     string
)

func TestMain(m *testing.M) {
	admin := fmt.Sprintf("any:%s@127.0.0.1:%s", os.Getenv("TEST_TOKEN"), os.Getenv("TEST_ADMIN_PORT"))
	url := fmt.Sprintf("http://%s/token/%s?description=client", admin, Namespace)
	resp, err := http.Post(url, "", nil)
	if err != nil || resp.StatusCode != http.StatusCreated {
		panic("Failed to create testing token")
	}
	var made struct {
		Token string `json:"token"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&made); err != nil {
		panic(err)
	}
	Token = made.Token
	os.Exit(m.Run())
}
